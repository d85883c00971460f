"""The serving platform: core vocabulary, engine, clients, HTTP server and command line."""

if __name__ == "platform":
    # Started at the repository root, Python finds this folder instead of the standard library's `platform`:
    # put the real one into sys.modules (the import machinery returns what it finds there) and define nothing else.
    import os
    import sys
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("platform", os.path.join(os.path.dirname(os.__file__), "platform.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["platform"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["platform"])
