"""Attention that is written out, as `FuseAttention` reads it: by the flow of data from a softmax to the products beside it.

`attention_reader` finds and checks the places, `scores` reads the way from one product to the other, `masks` what is
added and filled there, `heads` shapes and dtypes, and `attention_steps` single operators.
"""
