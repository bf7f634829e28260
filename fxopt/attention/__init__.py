"""Reads attention that is written out for `FuseAttention`, by the flow of data from a softmax to the products around it.

`attention_reader` finds and checks sites. `scores` reads the steps between the two products, `masks` the masks that are
added or filled, and `attention_steps` single operators. `heads` checks shapes and dtypes.
"""
