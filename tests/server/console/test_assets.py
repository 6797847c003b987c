"""The console's files: all of them plain, none of them from elsewhere, and the vendored ones unchanged."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from server.console import CONTENT_SECURITY_POLICY, assets
from server.console.assets import FOLDER

VENDOR = FOLDER / "vendor"
VENDORED: list[dict[str, Any]] = json.loads((VENDOR / "checksums.json").read_text())
OWN = [file for file in sorted(FOLDER.rglob("*")) if file.is_file() and VENDOR not in file.parents]
SCRIPTS = [file for file in OWN if file.suffix == ".js"]
IMPORT = re.compile(r'^(?:import|export)\b[^;"]*?from "([^"]+)";|^import "([^"]+)";', re.MULTILINE)


def test_every_file_of_the_folder_is_an_asset() -> None:
    files = {file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*") if file.is_file()}
    assert set(assets()) == files
    assert len({asset.tag for asset in assets().values()}) == len(files)


def test_vendored_files_are_those_that_were_recorded() -> None:
    licences = {path for each in VENDORED for path in each["licences"]}
    scripts = {each["file"] for each in VENDORED}
    there = {file.relative_to(VENDOR).as_posix() for file in VENDOR.rglob("*") if file.is_file()}
    assert there == {"checksums.json", *licences, *scripts}
    for each in VENDORED:
        assert hashlib.sha256((VENDOR / each["file"]).read_bytes()).hexdigest() == each["sha256"], each
        assert each["licences"] and all((VENDOR / path).stat().st_size > 500 for path in each["licences"])


@pytest.mark.parametrize("each", VENDORED, ids=lambda each: str(each["package"]))
def test_vendored_files_are_those_of_the_packages(each: dict[str, Any], tmp_path: Path) -> None:
    """Where npm has the packages in its cache; nothing is asked of the network."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    name = f"{each['package']}@{each['version']}"
    packed = subprocess.run(
        ["npm", "pack", "--offline", "--silent", name], cwd=tmp_path, capture_output=True, timeout=60
    )
    if packed.returncode:
        pytest.skip(f"npm has no {name} in its cache: npm cache add {name}")
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as opened:
        member = opened.extractfile(f"package/{each['path']}")
        assert member is not None
        assert hashlib.sha256(member.read()).hexdigest() == each["sha256"]


def test_modules_import_only_files_that_there_are() -> None:
    assert SCRIPTS
    for file in SCRIPTS:
        for match in IMPORT.finditer(file.read_text()):
            named = match[1] or match[2]
            assert named.startswith("."), f"{file.name} imports {named}"
            assert (file.parent / named).resolve().is_relative_to(FOLDER)
            assert (file.parent / named).is_file(), f"{file.name} imports {named}"


def test_nothing_is_inline_and_nothing_is_from_elsewhere() -> None:
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page) == []
    assert all(
        not where.startswith(("http:", "https:", "//"))
        for where in re.findall(r'(?:src|href)="([^"]*)"', page)
    )
    for file in OWN:
        text = file.read_text()
        hosts = set(re.findall(r"https?://([\w.-]+\w)", text)) - {"www.w3.org"}
        assert hosts == set(), f"{file.name} names {hosts}"
        if file.suffix == ".css":
            assert "@import" not in text and "url(" not in text
        if file.suffix == ".js":
            assert (
                re.findall(r"\beval\(|new Function|\.innerHTML|insertAdjacentHTML|document\.write", text)
                == []
            )
            assert "dangerouslySetInnerHTML" not in text


def test_the_policy_is_strict() -> None:
    rules = dict(rule.split(" ", 1) for rule in CONTENT_SECURITY_POLICY.split("; "))
    assert (
        rules["default-src"] == rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    )
    assert rules["img-src"] == "'self' data:"
    for nobody in ("object-src", "frame-src", "frame-ancestors", "base-uri", "form-action"):
        assert rules[nobody] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in CONTENT_SECURITY_POLICY


@pytest.mark.parametrize(
    ("header", "known"),
    [("", False), ('"TAG"', True), ('W/"TAG"', True), ('"a", "TAG"', True), ("*", True), ('"a"', False)],
)
def test_what_a_client_knows(header: str, known: bool) -> None:
    asset = assets()["main.js"]
    assert asset.is_known(header.replace("TAG", asset.tag)) is known


@pytest.mark.parametrize(
    ("accepts", "packed"),
    [("gzip", True), ("br, gzip;q=0.8", True), ("*", True), ("gzip;q=0", False), ("br", False), ("", False)],
)
def test_encodings(accepts: str, packed: bool) -> None:
    asset = assets()["console.css"]
    assert (asset.content(accepts) != asset.body) is packed
    assert ("content-encoding" in asset.headers(accepts)) is packed
    if packed:
        assert len(asset.content(accepts)) < len(asset.body) / 2
