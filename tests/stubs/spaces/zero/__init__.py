"""What a server that doesn't use Gradio's launch calls itself."""

started = []


def startup():
    started.append(True)
