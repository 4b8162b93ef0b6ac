"""The tiny model of all tests, and its data."""

import pytest
import torch

from mhaprune.data import Splits
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sort import Sort
from support.models import gated_model


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def task() -> Sort:
    return Sort(train=200, valid=16, score=24, choose=16, report=16, num_symbols=5, max_length=6)


@pytest.fixture(scope="session")
def splits(task: Sort) -> Splits:
    return task.splits()


@pytest.fixture
def model(task: Sort) -> Seq2Seq:
    return gated_model(task)
