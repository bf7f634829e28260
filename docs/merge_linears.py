"""Draws one attention block before and after `MergeLinears`, side by side: `make pictures`, which needs Graphviz."""

import copy
import re
import sys

import torch
from torch import Tensor, nn

import fxopt

HEADS = 4
GAP, TITLE = 30, 30  # points


class Attention(nn.Module):
    """Self-attention as models write it: a layer each for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)
        self.value, self.output = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        heads = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.output(heads.transpose(1, 2).reshape(batch, length, width))


def side_by_side(pictures: dict[str, str]) -> str:
    """One SVG of several, each below its title."""
    sizes = [
        [float(re.search(rf'{side}="([\d.]+)pt"', p)[1]) for side in ("width", "height")]
        for p in pictures.values()
    ]
    parts, x = list[str](), 0.0
    for (title, picture), (width, _) in zip(pictures.items(), sizes, strict=True):
        parts.append(f'<text x="{x + 8:g}" y="20" font-weight="bold" font-size="15">{title}</text>')
        body = picture[picture.index("<svg") :].replace("<svg ", f'<svg x="{x:g}" y="{TITLE}" ', 1)
        body = re.sub(r'="([\d.]+)pt"', r'="\1"', body)  # a point would be scaled once more
        # Tooltips name files of this machine; an id may occur once.
        body = re.sub(r'</?a\b[^>]*>|<title>.*?</title>\n|<!--.*?-->\n| id="[^"]*"', "", body)
        parts.append(body)
        x += width + GAP
    width, height = x - GAP, max(height for _, height in sizes) + TITLE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
        'font-family="Helvetica,Arial,sans-serif" fill="#0f172a">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "</svg>\n"
    )


def main() -> None:
    """Write the picture to standard output."""
    torch.manual_seed(0)
    before = fxopt.trace(Attention().eval(), (torch.randn(2, 9, 64),))
    after = fxopt.MergeLinears()(copy.deepcopy(before))
    titles = {"before": before, "after MergeLinears: three layers are one": after}
    sys.stdout.write(side_by_side({title: fxopt.draw(graph) for title, graph in titles.items()}))


if __name__ == "__main__":
    main()
