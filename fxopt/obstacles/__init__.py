"""Questions that passes ask before they rewrite a place; an answer is the reason why it stays, in words.

| file | the question |
|---|---|
| `scaling`, `foldable` | can a layer scale and shift its channels, too? |
| `parameter_constants` | is this constant made of weights and numbers alone? |
| `slicing` | may this value become a slice of a larger tensor? |
| `rounding` | does what follows keep a small error small? |
| `layouts` | which part of a graph can work in channels_last? |
| `precision_plan` | what of a graph can run in a lower precision, and where are casts? |
"""
