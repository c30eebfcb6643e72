"""Rows that stay in the host's memory, and come to the device in bands.

`plan` cuts a graph into bands, `sizes` says how many there have to be, `memory` moves rows,
`pipeline` moves those of one band while another computes, `calls` runs a call band by band,
`gradients` its backward, by recomputation, and `session` gives a layer within a band the rows of
other bands. This package knows neither PyG nor DGL.
"""
