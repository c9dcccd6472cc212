"""What is installed is what is in the tree: both packages, the SQL, the command."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import tasklib
import tasklib_daemon

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.xdist_group("packaging")  # they share the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by hatchling, without isolation: the build needs nothing from the network."""
    place = tmp_path_factory.mktemp("wheel")
    build = f"import hatchling.build as b; print(b.build_wheel({str(place)!r}))"
    run = subprocess.run([sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True, check=True)
    return place / run.stdout.strip().splitlines()[-1]


def test_the_editable_install_has_both_packages() -> None:
    """`import tasklib_daemon` finds the folder below daemon/."""
    assert Path(tasklib.__file__).parent == ROOT / "tasklib"
    assert Path(tasklib_daemon.__file__).parent == ROOT / "daemon" / "tasklib_daemon"
    assert metadata.version("tasklib-pg") == tasklib.__version__


def test_the_wheel_has_everything(wheel: Path) -> None:
    """Every file of both packages, and nothing of the tests."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package, place in (("tasklib", ROOT), ("tasklib_daemon", ROOT / "daemon")):
        files = {
            str(path.relative_to(place))
            for path in (place / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert f"{package}/py.typed" in names
        assert files <= names
    assert not [name for name in names if name.startswith(("tests", "tools", "bench", "dev"))]


def test_the_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path, database_url: str) -> None:
    """Installed without the tree: it imports, finds its SQL, migrates and submits; the command answers.

    Its dependencies are those of this environment, so that nothing is downloaded.
    """
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(
        subprocess.run(
            [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python)]
    subprocess.run([*install, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    dependencies = Path(str(metadata.distribution("psycopg").locate_file(""))).resolve()
    for path in dependencies.iterdir():
        if "tasklib" not in path.name and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    program = "import tasklib; tasklib.init(); print(tasklib.__file__, tasklib.submit_task_sync('a'))"
    environment = {"DATABASE_URL": database_url, "PATH": os.environ["PATH"]}
    run = subprocess.run(
        [python, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith(str(site))
    command = tmp_path / "env" / "bin" / "tasklib"
    listed = subprocess.run([command, "list"], env=environment, capture_output=True, text=True, check=True)
    assert "pending" in listed.stdout
