"""One model and what pipelines make of it: captured, rewritten, judged; and where and why something is wrong."""
