"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from tests.toy import write_toy_checkpoint


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny complete checkpoint in the released layout. Shared: copy it before changing it."""
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy") / "checkpoint")
