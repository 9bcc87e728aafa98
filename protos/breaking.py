"""What a change of the proto would break, told by `buf breaking` from two descriptor sets."""

import subprocess
import sys
from pathlib import Path

# All that generated code and the wire depend on: nothing leaves, nothing changes name, number,
# type, label or oneof.
_RULES = '{"version": "v2", "breaking": {"use": ["FILE"]}}'


def changes(new: Path, old: Path) -> list[str]:
    """One line a change that breaks clients made from `old`; none where `new` only adds."""
    buf = Path(sys.executable).parent / "buf"
    command = [str(buf), "breaking", str(new), "--against", str(old), "--config", _RULES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 100):  # 100: it found something
        raise SystemExit(f"buf breaking failed: {done.stderr.strip()}")
    return done.stdout.splitlines()
