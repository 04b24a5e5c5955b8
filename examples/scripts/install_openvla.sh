#!/usr/bin/env bash
# Creates .venv-openvla (or the folder named by the first argument): OpenVLA-OFT's own code and the versions it needs, to
# compare it with this package (tests/integration/test_public_openvla.py). PYTHON names the interpreter to use (3.10 or
# 3.11), OPENVLA_OFT a copy of the code that is already there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder="${1:-.venv-openvla}"
commit=213c5ff8d6e9673885d7e4dd6f2ce73b5d8a45db
"${PYTHON:-python3}" -m venv "$folder"
python="$folder/bin/python"
# torch first and exact, as in constraints.txt: another version could pull in several GB of CUDA libraries.
"$python" -m pip install --quiet "$(grep -m 1 '^torch==' constraints.txt)" 'numpy<2'
"$python" -m pip install --quiet transformers==4.40.1 tokenizers==0.19.1 'numpy<2' safetensors pillow psutil accelerate
# Without its dependencies: torchvision asks for a torch of its own, of which only timm's imports are used.
"$python" -m pip install --quiet --no-deps timm==0.9.16 peft==0.11.1 torchvision==0.15.2
code="${OPENVLA_OFT:-$folder/openvla-oft}"
if [ ! -d "$code/prismatic" ]; then
  git clone --quiet https://github.com/moojink/openvla-oft "$code"
  git -C "$code" checkout --quiet "$commit"
fi
realpath "$code" > "$("$python" -c 'import site; print(site.getsitepackages()[0])')/openvla.pth"
"$python" -c 'import timm, peft, transformers' 2> /dev/null
echo "OpenVLA-OFT is installed; compare with it: python -m pytest -m slow tests/integration/test_public_openvla.py"
