#!/usr/bin/env bash
# Tests of the adapters with packages that the development environment lacks or has in another version, from PyPI: each in
# an environment of its own that has .venv beneath it. Megatron-Core's run in scripts/test.sh.
#   bash scripts/lab/test_adapters.sh [PYTHON]      default: .venv/bin/python
set -euo pipefail
cd "$(dirname "$0")/../.."
base=${1:-$PWD/.venv/bin/python}
site=$("$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# NAME PACKAGE... -- FILE...: packages without their dependencies, which .venv has.
check() {
  local env=.venv_adapters/$1 packages=(); shift
  while [ "$1" != -- ]; do packages+=("$1"); shift; done
  shift
  [ -d "$env" ] || "$base" -m venv --without-pip "$env"
  "$base" -m pip --python "$env/bin/python" install -q --no-deps --upgrade "${packages[@]}"
  # Not the path alone: .pth files of .venv count too, as that of CuTe DSL.
  echo "import site; site.addsitedir('$site')" > "$(echo "$env"/lib/python*/site-packages)/zz_base.pth"
  PYTHONPATH=$PWD "$env/bin/python" -m pytest -q -n 0 "$@"
}

check newest transformers accelerate -- tests/adapters/test_transformers_*.py tests/adapters/trainers/test_transformers_*.py
check accelerate accelerate -- tests/adapters/test_transformers_expert_parallel.py
needed=(multiprocess dill xxhash pandas python-dateutil tzdata) # by datasets
check torchtitan torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring-parser typeguard torchdata torch_checkpointing \
  torch==2.14.1 nvidia-nccl-cu13==2.30.7 datasets==4.7.0 "${needed[@]}" -- tests/adapters/test_torchtitan.py tests/adapters/trainers/test_torchtitan_trainer.py
check trl trl==1.16.0 datasets==5.2.0 "${needed[@]}" -- tests/adapters/trainers/test_other_trainers.py
check lightning lightning==2.6.6 pytorch-lightning==2.6.6 lightning-utilities torchmetrics -- tests/adapters/trainers/test_other_trainers.py
check deepspeed deepspeed==0.19.8 hjson ninja py-cpuinfo msgpack -- tests/adapters/trainers/test_other_trainers.py
check jax jax==0.11.2 jaxlib==0.11.2 ml_dtypes opt_einsum scipy -- tests/extras/jax tests/test_use_it.py
check veomni veomni==0.1.12 transformers==5.9.0 tokenizers==0.22.2 huggingface_hub==1.33.0 -- tests/adapters/test_veomni.py
check hub kernels==0.17.2 -- tests/lab/test_build_hub_kernel.py
