"""The one room that knows transformers' insides: it joins pathways and solvers to a model.

Where to look:

- on disk: `adapters` (PEFT), `loading`, `saving`, `described`, `folder_config`
- attaching: `attach`, `intercept` (what is put on a model), `given` (what users hand over),
  `learning` (the probe forwards)
- a forward: `forward`, `block` (what solvers see), `modes` (how the layers run), `looping`
- what a forward works on: `stack` (the list that records), `collecting`, `state`,
  `rollout_cache`, `tokens` (padding and documents), `checkpointing`, `compiling`
- the recurrence in a model: `attachment` and its finders, `heads`, `vocabulary`, `owners`,
  `support`, `offloading`, `arguments` (of layer calls)
"""

from importlib.util import find_spec

import undertow.host.loading  # transformers learns to load what a hosted model saved
from undertow.host.attach import attach, depth_report, detach, report, set_solver
from undertow.host.compiling import compile_layers

if find_spec("peft") is not None:
    import undertow.host.adapters  # noqa: F401  # PEFT learns to load adapters with a recurrence

__all__ = ["attach", "compile_layers", "depth_report", "detach", "report", "set_solver"]
