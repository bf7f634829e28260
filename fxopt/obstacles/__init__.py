"""Questions that passes ask before they rewrite a site; an answer is a reason for a refusal, in words.

| file | the question |
|---|---|
| `scaling`, `foldable` | can a layer scale and shift its channels, too? |
| `parameter_constants` | is this constant computed only from weights and numbers? |
| `slicing` | may this value become a slice of a larger tensor? |
| `rounding` | do the nodes that follow keep a small error small? |
| `layouts` | which part of a graph can compute in channels_last? |
| `precision_plan` | which part of a graph can run in a lower precision, and where are casts? |
"""
