"""One model and its graphs after pipelines: captured, rewritten and judged, with the reason and place of an error."""
