# SPDX-License-Identifier: Apache-2.0
"""Runs programs that have an engine in their own process: `offline_engines.py JSON`, a list of [MODULE, ARGUMENT...].

Each runs in a fork of this process, which imports vLLM once for all. Prints what each module's `main` returns, as
`RESULT [INDEX, VALUE]`; one that fails prints no such line.
"""

import importlib
import json
import os
import sys
import traceback


def main(programs: list[list[str]]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm.entrypoints.llm
    import vllm.v1.engine.core  # noqa: F401

    for index, (module, *arguments) in enumerate(programs):
        forked = os.fork()
        if forked == 0:
            try:
                value = importlib.import_module(module).main(*arguments)
                print("\nRESULT", json.dumps([index, value]))
            except BaseException:  # noqa: BLE001 - a fork must not go on in this function
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(forked, 0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
