"""Run cases of the official ONNX suite through the plain interpreter: ``suite_tool.py Add Mul``.

Arguments are operation types; every node case whose model uses one of them is run.
"""

import sys
import traceback
import warnings

import numpy as np
from onnx.backend.test.runner import Runner, _normalize_tensor

from penstock.frontends.onnx.importer import load_onnx
from tests.support.graphs import interpret
from tests.support.onnx_cases import node_cases


def main() -> None:
    names = {a for a in sys.argv[1:] if not a.startswith("-")}
    verbose = "-v" in sys.argv
    passed, failed = 0, 0
    warnings.simplefilter("error")
    for case in node_cases():
        used = {node.op_type for node in case.model.graph.node}
        if not used & names and case.name not in names:
            continue
        try:
            with warnings.catch_warnings():
                model = load_onnx(case.model)
            for inputs, outputs in case.data_sets:
                feeds = [_normalize_tensor(x) for x in inputs]
                want = [_normalize_tensor(x) for x in outputs]
                got = interpret(model.graph, feeds)
                Runner.assert_similar_outputs(want, got, rtol=case.rtol, atol=case.atol)
            passed += 1
        except Exception as error:
            failed += 1
            text = str(error).strip().splitlines()
            if failed < 60:
                print("FAILED", case.name, type(error).__name__, " ".join(text)[:200])
            if verbose:
                traceback.print_exc()
    print(f"{passed} passed, {failed} failed")


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
