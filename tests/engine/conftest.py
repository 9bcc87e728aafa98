"""Engines for tests: SmolLM2 once a session, and tiny random models, a fresh engine each time."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from prefixcache import Engine, EngineConfig
from prefixcache.engine.messages import FlushCache, Release
from tests.leaks import check_nothing_is_lost
from tests.model.checkpoints import default_model_path, write_checkpoint

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny checkpoints by family and configuration fields, each written once."""
    written: dict[str, Path] = {}

    def find(family: str = "llama", **fields: Any) -> Path:
        key = f"{family}-{sorted(fields.items())}"
        if key not in written:
            directory = tmp_path_factory.mktemp(family) / "model"
            written[key] = write_checkpoint(directory, family, **fields)
        return written[key]

    return find


@pytest.fixture(scope="session")
def smollm2_engine() -> Engine:
    return Engine(
        EngineConfig(
            model=str(default_model_path()),
            num_gpu_blocks_override=512,
            max_model_len=2048,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            seed=1,
        )
    )


@pytest.fixture
def smollm2(smollm2_engine: Engine) -> Engine:
    """SmolLM2 in float32, blocks of 16; its cache is empty, and no sequence is kept."""
    for entry in list(smollm2_engine.registry.entries(None)):
        smollm2_engine.execute(Release("release", entry.sequence.id))
    smollm2_engine.execute(FlushCache("flush"))
    smollm2_engine.step()
    assert smollm2_engine.manager.num_free == smollm2_engine.num_blocks
    return smollm2_engine


@pytest.fixture(scope="session")
def smollm2_reference() -> transformers.LlamaForCausalLM:
    """SmolLM2 as transformers reads it from the GGUF file, configuration and weights.

    What `from_pretrained(gguf_file=…)` does, which wants the accelerate package for nothing here.
    """
    path = default_model_path()
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        model = transformers.LlamaForCausalLM(config)
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(weights, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.float().eval()


@pytest.fixture(scope="session")
def traffic_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What random traffic runs on."""
    return write_checkpoint(tmp_path_factory.mktemp("traffic") / "llama", "llama", seed=3)


@pytest.fixture(scope="session")
def quiet(traffic_model: Path) -> Engine:
    """Its reference: nothing cached, nothing shared, nothing else running, nothing failing."""
    return Engine(
        EngineConfig(
            model=str(traffic_model),
            enable_prefix_caching=False,
            num_gpu_blocks_override=64,
            max_model_len=128,
        )
    )


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Every engine that the test makes, in whatever way."""
    made: list[Engine] = []
    make = Engine.__init__

    def noted(self: Engine, *arguments: Any, **settings: Any) -> None:
        make(self, *arguments, **settings)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", noted)
    return made


@pytest.fixture
def make_engine(checkpoint_of: Callable[..., Path]) -> Iterator[MakeEngine]:
    """A fresh engine on a tiny model (blocks of 4 tokens unless said), by EngineConfig's fields.

    One thread: for operations this small a team of threads only waits for one another.
    """

    def make(family: str = "llama", model: dict[str, Any] | None = None, **fields: Any) -> Engine:
        settings: dict[str, Any] = {
            "block_size": 4,
            "num_gpu_blocks_override": 512,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "digest_seed": 1,
            "seed": 1,
        }
        directory = checkpoint_of(family, **(model or {}))
        return Engine(EngineConfig(model=str(directory), **{**settings, **fields}))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_is_lost(request: pytest.FixtureRequest, engines: list[Engine]) -> Iterator[None]:
    """After each test every engine is idle; no block, sequence, lease or pin has lost its owner."""
    shared = "smollm2" in request.fixturenames
    smollm2 = [request.getfixturevalue("smollm2_engine")] if shared else []
    yield
    for engine in [*engines, *smollm2]:
        check_nothing_is_lost(engine)
