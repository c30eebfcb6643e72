"""Layers inside ``torch.compile``: each call is one operator that the compiler carries.

Dynamo traces `tracing` in the place of a layer's ``forward``, `messages` in that of ``propagate``.
`described` describes a call in text, by the tables of `kinds`. `operators` are the operators, and
`standins` run such a text on real tensors, on the route of any other call.
"""
