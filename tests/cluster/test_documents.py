"""The page on clusters: its code, which needs Ray, prints what it says."""

from __future__ import annotations

from tests.test_readme import ROOT, blocks, plain


def test_code_of_the_page_on_clusters_prints_what_it_says(ray_started, capsys):
    (language, code), (_, printed), *_ = blocks(ROOT / "docs" / "clusters.md")
    assert language == "py"
    exec(compile(code, "clusters.md", "exec"), {})
    assert plain(capsys.readouterr().out) == plain(printed)
