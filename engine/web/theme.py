"""The look that Gradio's own widgets take on; everything else is in style.css. Nothing is fetched from elsewhere."""

from __future__ import annotations

import gradio as gr

# Relative addresses: the page may lie below a path of a proxy.
HEAD = """
<link rel="stylesheet" href="web/style.css">
<link rel="stylesheet" href="web/compare_tab.css">
<link rel="stylesheet" href="web/world.css">
<link rel="stylesheet" href="web/history.css">
<link rel="icon" type="image/svg+xml" href="web/icon.svg">
<script src="web/player.js"></script>
<script src="web/clock.js"></script>
<script src="web/compare.js"></script>
<script src="web/grid.js"></script>
<script src="web/page.js"></script>
"""


def theme() -> gr.themes.Base:
    """Grey and one colour, fonts of the system, lines instead of boxes and shadows."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.zinc,
        radius_size=gr.themes.sizes.radius_md,
        font=["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Consolas", "monospace"],
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color="*neutral_800",
        body_text_color_dark="*neutral_200",
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        block_shadow="none",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_padding="0px",
        block_title_text_weight="500",
        block_title_text_color="*neutral_600",
        block_title_text_color_dark="*neutral_400",
        border_color_primary="*neutral_200",
        border_color_primary_dark="*neutral_800",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_color="*neutral_300",
        input_border_color_dark="*neutral_700",
        input_border_color_focus="*primary_600",
        input_border_color_focus_dark="*primary_400",
        input_shadow="none",
        input_shadow_focus="none",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        button_primary_text_color="white",
        button_primary_text_color_dark="white",
        button_secondary_background_fill="white",
        button_secondary_background_fill_dark="*neutral_900",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="*neutral_700",
        button_border_width="1px",
        color_accent="*primary_600",
        slider_color="*primary_600",
        slider_color_dark="*primary_400",
    )
