"""Make what follows from the proto, or check that what is committed is current.

python protos/generate.py           the stubs, the descriptor set and docs/api-reference.md
python protos/generate.py --check   exit 1, naming the files, where they differ

Both first compare the proto with the committed descriptor set and stop at what would break clients;
docs/api.md has the policy.
"""

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import breaking
import grpc_tools
import reference
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PROTO = "prefixcache_service/v1/prefixcache.proto"
STUBS = "service"
DESCRIPTORS = "protos/prefixcache.v1.binpb"
REFERENCE = "docs/api-reference.md"


def compile_protos(protos: Path, *options: str) -> None:
    """Run protoc on the proto below `protos`; SystemExit where it does not compile."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    if protoc.main(["protoc", f"-I{protos}", f"-I{well_known}", *options, PROTO]) != 0:
        raise SystemExit("protoc failed")


def describe(protos: Path, target: Path) -> None:
    """Write the descriptor set of the proto below `protos`: its contract, without its comments."""
    compile_protos(protos, f"--descriptor_set_out={target}")


def generate(root: Path) -> list[str]:
    """Write everything below `root`, laid out as below the project's; returns the files' names."""
    stubs, descriptors, page = root / STUBS, root / DESCRIPTORS, root / REFERENCE
    for folder in (stubs, descriptors.parent, page.parent):
        folder.mkdir(parents=True, exist_ok=True)
    compile_protos(PROTOS, *(f"--{kind}_out={stubs}" for kind in ("python", "pyi", "grpc_python")))
    describe(PROTOS, descriptors)
    with tempfile.TemporaryDirectory() as folder:
        commented = Path(folder) / "commented.binpb"
        compile_protos(PROTOS, f"--descriptor_set_out={commented}", "--include_source_info")
        (file,) = FileDescriptorSet.FromString(commented.read_bytes()).file
    page.write_text(reference.render(file))
    made = stubs.glob(f"{PROTO.removesuffix('.proto')}_pb2*")
    return sorted(str(path.relative_to(root)) for path in (*made, descriptors, page))


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    only_check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        names = generate(Path(folder))
        if broken := breaking.changes(Path(folder) / DESCRIPTORS, ROOT / DESCRIPTORS):
            sys.exit("\n".join([*broken, "this would break clients: see docs/api.md, Versions"]))
        _, differ, missing = filecmp.cmpfiles(folder, ROOT, names, shallow=False)
        stale = sorted(differ + missing)
        if only_check and stale:
            sys.exit(f"stale: {', '.join(stale)}; run `make proto`")
        for name in stale:
            shutil.copyfile(Path(folder) / name, ROOT / name)


if __name__ == "__main__":
    main()
