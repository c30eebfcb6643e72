"""Rows that are gathered in int8 or bf16, where the user asked for it: Tango's quantized training
(arXiv 2308.00890).

Accuracy rules, and the module that keeps each:

===========================================
============================================================
the layer before the softmax stays fp32      `gnnaccel.quantization.before_the_softmax`, `order`
without a model
scores, softmax of attention stay fp32       `attention`: only values and the result's gradient are
rounded
loss, weight gradients and update stay fp32  nothing here touches them: parameters and linear maps
are the layer's own
one scale per row, not per tensor            `rows.by_torch`, `cuda.int8.quantize.int8_rows`
stochastic rounding of gradients             `rows.stochastic`: by torch's generator; to nearest
where determinism is demanded
quantize once, use in forward and backward   `aggregation`: values of the forward serve the weights'
gradient, one
                                             rounded gradient
                                             serves the sums and the inner products (SPMM and SDDMM)
none where it does not pay                   `cost`
===========================================
============================================================
"""
