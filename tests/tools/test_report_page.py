"""The report in a real browser: charts that can be read on a narrow screen."""

from attn_engine.report.write import write_reports


def test_charts_keep_their_size_and_scroll_on_a_narrow_screen(visit, fake, tmp_path):
    page = visit(
        write_reports([fake()], tmp_path)[0].read_text("utf-8"),
        viewport={"width": 400, "height": 800},
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    scales = page.locator("svg").evaluate_all(
        "all => all.map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width)"
    )
    assert len(scales) > 9 and min(scales) > 0.85  # 11 px letters stay above 9
    for charts in page.locator(".charts").all():
        room = charts.evaluate(
            "c => c.scrollWidth - c.lastElementChild.getBoundingClientRect().width"
        )
        assert room >= -1 and charts.evaluate("c => c.scrollWidth > c.clientWidth")
        assert "gradient" in charts.evaluate("c => getComputedStyle(c).backgroundImage")
        assert charts.get_attribute("tabindex") == "0"
