"""Layers inside ``torch.compile``: each call is one operator that the compiler carries.

`tracing` is what Dynamo traces in the place of a layer's ``forward``, `described` says in text what
a call computes, `operators` are the operators, and `standins` run such a text on real tensors, on
the route of any other call.
"""
