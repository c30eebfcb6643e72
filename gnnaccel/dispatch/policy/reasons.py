"""Why a call did not take a faster route: `Reason` and the registry of codes.

Codes are stable: a code's meaning never changes once released. ``docs/reasons.md`` lists them and a
test keeps the two equal. GA1xx: rules and user's choice; GA2xx: not supported; GA3xx: not
profitable; GA4xx: environment; GA5xx: the host's hooks; GA6xx: reduced precision was asked for, and
fp32 runs; GA7xx: the graph is partitioned over processes.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Reason:
    """One cause. ``code`` like ``"GA203"``; ``text`` says what was seen; ``hint`` what would change
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
    "GA101": Kind("excluded by a rule", "gnnaccel.include(...) or drop the exclude rule"),
    "GA102": Kind("not in the include list",
                  "add the layer's class or name to enable(include=...)"),
    "GA103": Kind("excluded by an attribute of its class", "set __gnnaccel__ = True on the class"),
    "GA104": Kind("gnnaccel is disabled here",
                  "leave the disabled() block or call gnnaccel.enable()"),
    "GA105": Kind("the decision is pinned", "leave out decisions=, or GNNACCEL_DECISIONS"),
    "GA201": Kind("aggregation is not a plain sum", "use aggr='add'"),
    "GA202": Kind("unusual flow or node_dim",
                  "use flow='source_to_target' and the layer's own node_dim"),
    "GA203": Kind("dtype is not supported", "use float32, float16 or bfloat16"),
    "GA204": Kind("adjacency form is not supported", "pass edge_index as a tensor of shape [2, E]"),
    "GA205": Kind("subclass overrides the layer's own methods",
                  "enable(include=...) cannot help; keep it native"),
    "GA206": Kind("input shape is not supported", "pass x of shape [N, F]"),
    "GA207": Kind("width per head is too large", "use at most 512 channels per head"),
    "GA208": Kind("option is not supported", "see docs/compatibility.md"),
    "GA209": Kind("lazy parameters are not initialised yet", "the next call is considered anew"),
    "GA210": Kind("layers inside it are routed one by one", "see the records of the layers inside"),
    "GA211": Kind("message or reduce function is the user's own",
                  "use built-in functions, such as fn.u_mul_e and fn.sum"),
    "GA301": Kind("native is estimated to be as fast",
                  "enable(when='supported') takes it over anyway"),
    "GA302": Kind("another candidate is estimated to be faster",
                  "nothing to do: a faster route was taken"),
    "GA303": Kind("there are no edges", "nothing to gain"),
    "GA401": Kind("no CUDA device and no gain on this device", "run on a GPU"),
    "GA402": Kind("CuPy is not installed", "pip install 'gnnaccel[cuda13]' or 'gnnaccel[cuda12]'"),
    "GA403": Kind("a kernel did not compile", "see the log; report it with the compiler's output"),
    "GA404": Kind("inside torch.compile, torch.jit or torch.fx",
                  "compiled regions run the host's own code"),
    "GA405": Kind("inside a functorch transform", "call the layer outside vmap, grad or jvp"),
    "GA406": Kind("backend was chosen by the user", "enable(backend='auto')"),
    "GA407": Kind("a CUDA graph is captured, and the relations' structure is not there",
                  "run the same step once before the capture"),
    "GA501": Kind("message-passing hooks are registered", "remove the hooks from the layer"),
    "GA502": Kind("explanation is switched on", "explainers need the host's own messages"),
    "GA503": Kind("decomposed_layers is not 1", "set decomposed_layers=1"),
    "GA504": Kind("a function of the host's is replaced",
                  "put the host's own back, or keep the layer native"),
    "GA601": Kind("fp32 was asked for",
                  "change overrides, filter_fn, the precision() block or GNNACCEL_PRECISION"),
    "GA602": Kind("the layer before the softmax stays fp32",
                  "overrides={name: 'int8'} quantizes it all the same"),
    "GA603": Kind("cannot be quantized", "see docs/quantization.md for what can"),
    "GA604": Kind("quantizing is estimated not to pay",
                  "enable(when='supported') quantizes anyway"),
    "GA605": Kind("the guard sent the layer back to fp32",
                  "look at quant_report(); quantize() again starts anew"),
    "GA606": Kind("it is not known yet which layer comes last",
                  "the next pass knows; quantize(model) knows at once"),
    "GA607": Kind("the call runs natively", "see why in records()"),
    "GA701": Kind("needs all nodes of the graph at once",
                  "take it out of the model, or run it over the whole graph"),
    "GA702": Kind("cannot run over a partitioned graph", "see docs/distributed.md for what can"),
    "GA703": Kind("batch normalisation sees the nodes of one part",
                  "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), on GPUs"),
}


def reason(code: str, text: str = "", hint: str = "") -> Reason:
    """A `Reason` with a registered code; text and hint default to the code's own. KeyError if it is
    not registered."""
    kind = KINDS[code]
    return Reason(code, text or kind.title, hint or kind.hint)
