"""The kernels in the models of transformers: `apply(model)`, or the experts alone.

    from phalanx.adapters import transformers
    print(transformers.apply(model))
    model = AutoModelForCausalLM.from_pretrained(NAME, experts_implementation="phalanx")

`trainer` has a callback that applies them, and captured steps, for the Trainer.

`apply` also replaces norms, rotary embeddings, routers, the loss and attention (`whole`).

The import registers the implementation for every class of experts that transformers dispatches; of
others a warning names the class. Models that are loaded, or made by `from_config`, are checked at
once (`prepare`): experts whose activation is not known are refused by the name of their class.
Parameters stay as transformers has them; weights in another layout are copied in each pass, unless
`convert(model)` converts them. `expert_parallel` shares experts between ranks. `fuse_norms(model)`
has RMSNorms computed by torch's fused kernel, which saves a quarter of a step of Qwen3-30B-A3B's
layers.
"""

import transformers
from transformers import PreTrainedModel

try:
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as missing:
    raise ImportError(
        f"phalanx.adapters.transformers needs transformers 5.23 or newer, not "
        f"{transformers.__version__}: pip install 'phalanx-moe[transformers]'"
    ) from missing

from phalanx.adapters.expert_groups import groups, release
from phalanx.adapters.transformers.attention import FA4
from phalanx.adapters.transformers.expert_parallel import EP_NAME, SymmEP
from phalanx.adapters.transformers.experts import convert, forward
from phalanx.adapters.transformers.loading import chosen, prepared, warned
from phalanx.adapters.transformers.modules import NAME, prepare
from phalanx.adapters.transformers.norms import fuse_norms
from phalanx.adapters.transformers.whole import Report, apply

__all__ = [
    "EP_NAME",
    "FA4",
    "NAME",
    "Report",
    "apply",
    "convert",
    "fuse_norms",
    "groups",
    "prepare",
    "release",
]

ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
EPImplementationInterface.register(EP_NAME, SymmEP)
for _build in ("from_pretrained", "_from_config"):
    setattr(PreTrainedModel, _build, prepared(getattr(PreTrainedModel, _build)))
for _method, _wrapped in (("post_init", warned), ("set_experts_implementation", chosen)):
    setattr(PreTrainedModel, _method, _wrapped(getattr(PreTrainedModel, _method)))
