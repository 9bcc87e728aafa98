"""A real server on the real model, which every example leaves as it found it."""

import pytest

from prefixcache.config import EngineConfig
from tests.model.checkpoints import default_model_path
from tests.service.conftest import RunningServer


@pytest.fixture(scope="session")
def real():
    config = EngineConfig(
        model=str(default_model_path()),
        num_gpu_blocks_override=512,
        max_model_len=1024,
        max_num_seqs=32,
    )
    running = RunningServer(config).load()
    yield running
    running.close()


@pytest.fixture
def client(real):
    with real.client() as client:
        yield client
        assert client.sequences() == ()
    assert real.settle().blocks_in_use == 0
    real.check()
