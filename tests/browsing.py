"""What several browser tests do on the page."""

from typing import Any


def write_prompt(page: Any, text: str) -> None:
    """Put a text into the Generate tab's prompt, and see that it stays."""
    field = page.get_by_label("Prompt", exact=True)
    # What the page asks of the server when it is opened may still be on its way, and put the field back.
    for _ in range(10):
        field.fill(text)
        page.wait_for_timeout(250)
        if field.input_value() == text:
            break
