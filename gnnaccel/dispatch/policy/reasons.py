"""Why a call did not take a faster route: `Reason` and the registry of codes.

Codes are stable: a code's meaning never changes once released. ``docs/reasons.md`` lists them and a
test keeps the two equal. GA1xx: rules and the user's choices; GA2xx: not supported; GA3xx: no gain;
GA4xx: environment; GA5xx: hooks and replaced functions; GA6xx: reduced precision was asked for, and
fp32 runs; GA7xx: the graph is partitioned over processes.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Reason:
    """One cause. ``code`` like ``"GA203"``; ``text``: the finding; ``hint``: how to change
    it."""

    code: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.code} {self.text}"


@dataclass(frozen=True)
class Kind:
    """A registered code: its title, and the hint given when the reason itself brings none."""

    title: str
    hint: str


KINDS: dict[str, Kind] = {
    "GA101": Kind("excluded by a rule",
                  "include the layer by gnnaccel.include(...), or drop the exclude rule"),
    "GA102": Kind("not in the include list",
                  "add the layer's class or name to enable(include=...)"),
    "GA103": Kind("excluded by an attribute of its class", "set __gnnaccel__ = True on the class"),
    "GA104": Kind("gnnaccel is disabled here",
                  "leave the disabled() block, or call gnnaccel.enable()"),
    "GA105": Kind("a file of decisions says otherwise",
                  "leave out decisions= and GNNACCEL_DECISIONS"),
    "GA201": Kind("aggregation is not supported", "use aggr='add' if the model allows it"),
    "GA202": Kind("unusual flow or node_dim",
                  "use flow='source_to_target' and the layer's own node_dim"),
    "GA203": Kind("dtype is not supported", "use float32, float16 or bfloat16"),
    "GA204": Kind("form of the graph is not supported",
                  "pass edge_index as a tensor of shape [2, E]"),
    "GA205": Kind("a subclass redefines the layer's own methods",
                  "nothing: the layer's own code runs"),
    "GA206": Kind("input shape is not supported", "pass x of shape [N, F]"),
    "GA207": Kind("too many channels per head", "use at most 512 channels per head"),
    "GA208": Kind("option is not supported", "see docs/compatibility.md for what is supported"),
    "GA209": Kind("lazy parameters are not initialised yet",
                  "nothing: the next call is decided anew"),
    "GA210": Kind("layers inside it are decided one by one",
                  "see the records of the layers inside"),
    "GA211": Kind("message or reduce function is the user's own",
                  "use built-in functions, such as fn.u_mul_e and fn.sum"),
    "GA212": Kind("features were made in inference mode, and gradients are on",
                  "make them under torch.no_grad(), or pass a clone() of them"),
    "GA301": Kind("estimated to be no faster", "enable(when='supported') takes it over anyway"),
    "GA302": Kind("another way is estimated to be faster", "nothing to do: a faster way was taken"),
    "GA303": Kind("there are no edges", "nothing to do: there is nothing to accelerate"),
    "GA401": Kind("the tensors are on a CPU, where nothing is gained", "run on a GPU"),
    "GA402": Kind("CuPy is not installed", "pip install 'gnnaccel[cuda13]' or 'gnnaccel[cuda12]'"),
    "GA403": Kind("a kernel did not compile",
                  "see the log, and report it with the compiler's output"),
    "GA404": Kind("inside torch.compile, torch.jit or torch.fx",
                  "enable(compile=True) carries some layers through torch.compile; see "
                  "docs/compile.md"),
    "GA405": Kind("inside a function transform", "call the layer outside vmap, grad or jvp"),
    "GA406": Kind("ruled out by the chosen backend", "use enable(backend='auto')"),
    "GA407": Kind("captured in a CUDA graph without an earlier call",
                  "run the same step once before the capture"),
    "GA408": Kind("its kernels are being compiled in the background",
                  "later calls run by them; enable(first_use='wait') waits"),
    "GA409": Kind("the host samples in place of the GPU",
                  "nothing to do: a DGL built with CUDA samples on the GPU"),
    "GA501": Kind("message-passing hooks are registered", "remove the hooks from the layer"),
    "GA502": Kind("explanation is switched on",
                  "nothing: after explaining the layer is accelerated again"),
    "GA503": Kind("decomposed_layers is not 1", "set decomposed_layers=1"),
    "GA504": Kind("a function that the layer uses was replaced",
                  "put the original function back, or keep the layer native"),
    "GA601": Kind("fp32 was asked for",
                  "change overrides, filter_fn, the precision() block or GNNACCEL_PRECISION"),
    "GA602": Kind("the layer before the softmax stays in fp32",
                  "overrides={name: 'int8'} quantizes it anyway"),
    "GA603": Kind("cannot be quantized", "see docs/quantization.md for what can"),
    "GA604": Kind("quantizing is estimated not to pay",
                  "enable(when='supported') quantizes anyway"),
    "GA605": Kind("the accuracy check sent the layer back to fp32",
                  "look at quant_report(); quantize() again starts anew"),
    "GA606": Kind("it is not known yet which layer comes last",
                  "nothing: the next pass knows; quantize(model) knows at once"),
    "GA607": Kind("the call runs natively", "see why in records()"),
    "GA701": Kind("needs all nodes of the graph at once",
                  "take it out of the model, or run it over the whole graph"),
    "GA702": Kind("cannot run over a partitioned graph", "see docs/distributed.md for what can"),
    "GA703": Kind("batch normalisation sees the nodes of one part",
                  "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), on GPUs"),
    "GA704": Kind("runs whole in every process", "see docs/distributed.md for what is divided"),
}


def reason(code: str, text: str = "", hint: str = "") -> Reason:
    """A `Reason` with a registered code; text and hint default to the code's own. KeyError if it is
    not registered."""
    kind = KINDS[code]
    return Reason(code, text or kind.title, hint or kind.hint)
