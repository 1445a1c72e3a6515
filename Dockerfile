# The page in a container. PyTorch's wheels bring the CUDA libraries, so one image serves a GPU and a CPU alike:
#   docker build -t pan2-demo . && docker run --rm -p 7860:7860 [--gpus all] pan2-demo
# With a real checkpoint: -v /data/PAN2:/checkpoint:ro -e ENGINE_CHECKPOINT=/checkpoint
FROM python:3.12-slim

RUN useradd --create-home --uid 1000 user
USER user
WORKDIR /home/user/app
ENV PATH=/home/user/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    GRADIO_SERVER_NAME=0.0.0.0 \
    GRADIO_SERVER_PORT=7860 \
    ENGINE_OUTPUTS=/home/user/outputs \
    HF_HOME=/home/user/.cache/huggingface

COPY --chown=user pyproject.toml README.md LICENSE app.py ./
COPY --chown=user engine engine
COPY --chown=user kernels kernels
COPY --chown=user presets presets
RUN python -m venv /home/user/.venv \
    && pip install --no-cache-dir -e . \
    && mkdir -p /home/user/outputs /home/user/.cache/huggingface

VOLUME ["/home/user/outputs", "/home/user/.cache/huggingface"]
EXPOSE 7860
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:7860/healthz', timeout=4)"
CMD ["python", "app.py"]
