"""The site builds without a warning: its links lead somewhere, its API pages have every module."""

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT

pytest.importorskip("mkdocs")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site but for its search index and colours of code, which take half of the time."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.utils.yaml import yaml_load

    path, folder = ROOT / "mkdocs.yml", tmp_path_factory.mktemp("site")
    with open(path, encoding="utf-8") as file:
        written = yaml_load(file)
    plain = {"pymdownx.highlight": {"use_pygments": False}}
    config = load_config(
        str(path),
        plugins=[plugin for plugin in written["plugins"] if plugin != "search"],
        markdown_extensions=[*written["markdown_extensions"], plain],
        site_dir=str(folder),
        strict=True,
    )
    build(config)  # raises after warnings, which pytest shows
    return folder


def test_pages_of_the_root_and_sources_are_pages(site: Path) -> None:
    index = (site / "index.html").read_text("utf-8")
    assert 'href="source/moe/layer.py/"' in index and 'href="CONTRIBUTING/"' in index
    source = (site / "source/moe/layer.py/index.html").read_text("utf-8")
    assert "class" in source and "MoELayer" in source
    assert (site / "measured/compare/losses_gpt_oss_20b_4_layers.png").is_file()
    assert 'class="mermaid"' in (site / "design/index.html").read_text("utf-8")


def test_api_pages_have_every_module(site: Path) -> None:
    for package in ("configs", "extras", "kernels", "moe", "parallel"):
        page = (site / "api" / package / "index.html").read_text("utf-8")
        named = set(re.findall(r'id="(phalanx[\w.]+)"', page))
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(("phalanx", *path.relative_to(ROOT).with_suffix("").parts))
            public = not any(part.startswith("_") for part in path.relative_to(ROOT).parts)
            assert module in named or not public, module
