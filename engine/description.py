"""A prompt that is meant as a JSON description: it is passed on as it stands, but a slip in it is pointed out before.

PAN 2's captions are structured, and what is known of their form is not enough to check more than the syntax.
"""

from __future__ import annotations

import json


def fault(prompt: str) -> str | None:
    """Where the syntax of a description breaks, as a sentence; None for a whole one and for free text.

    What begins with a brace or a bracket is taken for JSON. Free text may begin so too, so that this is a hint and no
    refusal.
    """
    if not prompt.lstrip().startswith(("{", "[")):
        return None
    try:
        json.loads(prompt)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        return f"If this is meant as JSON: {where}: {error.msg}. It is sent as it stands."
    except (RecursionError, ValueError) as error:
        # Nesting of thousands of levels, numbers of thousands of digits.
        return f"If this is meant as JSON, it can't be read ({type(error).__name__}). It is sent as it stands."
    return None
