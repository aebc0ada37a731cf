"""One tiny model an architecture for the whole folder's tests; torch on one thread."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from tests.tiny_models import make_model

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Architecture -> the folder of its tiny model, built when first asked for."""
    folders: dict[str, Path] = {}

    def folder_of(architecture: str) -> Path:
        if architecture not in folders:
            folders[architecture] = make_model(tmp_path_factory.mktemp(architecture), architecture)
        return folders[architecture]

    return folder_of
