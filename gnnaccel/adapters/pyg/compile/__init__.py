"""Layers inside ``torch.compile``: each call is one operator that the compiler carries.

`tracing` is what Dynamo traces in the place of a layer's ``forward``, `messages` in that of
``propagate``. `described` says in text what a call computes, by the tables of `kinds`. `operators`
are the operators, and `standins` run such a text on real tensors, on the route of any other call.
"""
