"""DGL's layer classes, one module each: `state` and `run` of `gnnaccel.adapters.contract`."""
