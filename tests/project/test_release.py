"""What a release says of itself in several places is the same in all of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs the extra docs, which brings PyYAML")

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
FORMS = sorted((ROOT / ".github").rglob("*.y*ml"))


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"', PROJECT, re.MULTILINE)
    assert read("CITATION.cff")["version"] == version
    assert f"{version}" in (ROOT / "CHANGELOG.md").read_text()


def test_pythons() -> None:
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    assert read(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == classified
    assert f'requires-python = ">={classified[0]}"' in PROJECT


def test_badges(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say what pyproject.toml says. Where this fails: python docs/img/draw_badges.py, then the README."""
    monkeypatch.syspath_prepend(ROOT / "docs/img")
    draw_badges = importlib.import_module("draw_badges")
    badges = draw_badges.badges(PROJECT)
    assert {file.name for file in draw_badges.BADGES.iterdir()} == set(badges)
    for file, (name, value) in badges.items():
        assert (draw_badges.BADGES / file).read_text() == draw_badges.drawn(name, value)
    shown = re.findall(r"^\[!\[(.+)\]\(docs/img/badges/(.+)\)\]", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert shown == [(f"{name}: {value}", file) for file, (name, value) in badges.items()]


def test_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = read(".github/workflows/ci.yml")["jobs"]
    run = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    made = {command for command in run if command.startswith("make ")}
    assert {"make lint", "make test", "make test-models", "make docs", "make report", "make dist"} <= made
    assert {command.split()[1] for command in made} <= targets


def test_images() -> None:
    """The Compose file's Dockerfiles are there, and run a program that is; CI builds them all."""
    services = read("compose.yaml")["services"]
    images = read(".github/workflows/ci.yml")["jobs"]["images"]["strategy"]["matrix"]["image"]
    files = {f"docker/{name}.Dockerfile" for name in images}
    assert files == {service["build"]["dockerfile"] for service in services.values()}
    assert files == {str(file.relative_to(ROOT)) for file in (ROOT / "docker").iterdir()}
    for service in services.values():
        text = (ROOT / service["build"]["dockerfile"]).read_text()
        assert (ROOT / re.findall(r'CMD \["python", "(.+)"\]', text)[0]).exists()


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.name)
def test_commands_and_files_of_forms_exist(file: Path) -> None:
    text = file.read_text()
    yaml.safe_load(text)
    for page in re.findall(r"\b(?:docs|examples)/[\w/]+\.(?:md|py)", text):
        assert (ROOT / page).exists()
