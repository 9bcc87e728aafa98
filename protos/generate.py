"""Make the gRPC stubs from the proto, or check that the committed ones are current.

python protos/generate.py           writes service/prefixcache_service/v1/
python protos/generate.py --check   exit 1, naming the files, where they differ
"""

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = ROOT / "service"
PROTO = "prefixcache_service/v1/prefixcache.proto"


def generate(target: Path) -> None:
    """Write the stubs below `target`."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [f"-I{PROTOS}", f"-I{well_known}"]
    arguments += [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", *arguments, PROTO]) != 0:
        raise SystemExit("protoc failed")


def stale() -> list[str]:
    """Names of the committed stubs that differ from what the proto gives now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        made = [path.relative_to(folder) for path in Path(folder).rglob("*_pb2*")]
        _, differ, missing = filecmp.cmpfiles(folder, STUBS, map(str, made), shallow=False)
        return sorted(differ + missing)


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    if not parser.parse_args().check:
        generate(STUBS)
    elif names := stale():
        sys.exit(f"stale stubs: {', '.join(names)}; run `make proto`")


if __name__ == "__main__":
    main()
