"""deepinfer: DeepInfer as a research framework.

    import deepinfer as di
    eng = di.Engine.nano()  # a small model, trained on Python
    eng.generate("def read(path):", max_tokens=32, seed=0)

Every public name is listed in `__init__.pyi`, which editors and type checkers read. At run time a
name is imported when it is first used, so that `import deepinfer` costs nothing and loads neither
torch nor any optional package.
"""

import importlib

__version__ = "0.1.0"

# Public name -> "module" (the name is that module) or "module:attribute".
_WHERE = {
    "Completion": "deepinfer.engine.completion:Completion",
    "Completions": "deepinfer.engine.completion:Completions",
    "Engine": "deepinfer.engine.engine:Engine",
    "EngineConfig": "deepinfer.config:EngineConfig",
    "LLM": "deepinfer.compat.llm:LLM",
    "ModelConfig": "deepinfer.config:ModelConfig",
    "SamplingParams": "deepinfer.engine.sampling_params:SamplingParams",
    "Table": "deepinfer.tables.table:Table",
    "attention": "deepinfer.slots.attention",
    "check": "deepinfer.conformance:check",
    "compare": "deepinfer.measure.compare:compare",
    "data": "deepinfer.data",
    "experts": "deepinfer.slots.experts",
    "fmt": "deepinfer.session:fmt",
    "grammar": "deepinfer.slots.grammar",
    "kernels": "deepinfer.kernels",
    "measure": "deepinfer.measure",
    "notebook": "deepinfer.session:notebook",
    "replay": "deepinfer.slots.replay",
    "sampler": "deepinfer.slots.sampler",
    "verdict": "deepinfer.session:verdict",
    "verifier": "deepinfer.slots.verifier",
}

__all__ = [*sorted(_WHERE), "__version__"]


def __getattr__(name: str):
    where = _WHERE.get(name)
    if where is None:
        import difflib

        close = difflib.get_close_matches(name, _WHERE, n=1, cutoff=0.7)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}{hint}")
    module, _, attribute = where.partition(":")
    found = importlib.import_module(module)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
