# rlvla on CPUs: everything of the quickstart, rendering with EGL in software.
#   docker build --build-arg PIP_EXTRA_INDEX_URL=<index of PyTorch's CPU wheels> -t rlvla .
# Without the argument torch comes with several GB of CUDA libraries, which are of no use here.
#   docker run --rm -it --shm-size=2g -v "$PWD/runs:/rlvla/runs" rlvla bash examples/scripts/toy_reach.sh
FROM python:3.11-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# The compiler is for packages without a wheel and for DeepSpeed's launcher; the rest draws pictures without a screen.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libopengl0 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/*

ENV MUJOCO_GL=egl \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    DS_BUILD_OPS=0

WORKDIR /rlvla

# Packages first: they change more rarely than the code.
ARG PIP_EXTRA_INDEX_URL=""
COPY constraints.txt ./
# hadolint ignore=DL3013
RUN python -m venv .venv \
    && .venv/bin/pip install --upgrade pip "setuptools<81" wheel \
    && .venv/bin/pip install -c constraints.txt torch numpy

COPY . .
RUN .venv/bin/pip install -c constraints.txt -e ".[robosuite,libero,metaworld,vlm,video,lerobot,ray,serve,dev]" \
    && .venv/bin/pip install --no-deps -c constraints.txt hf-libero bddl metaworld imageio gymnasium-robotics pettingzoo \
    && touch ".venv/.installed-$(cat setup.py constraints.txt rlvla/version.py | sha256sum | cut -c1-16)"

RUN useradd --uid 1000 --create-home rlvla && mkdir -p runs && chown -R 1000:1000 /rlvla
USER 1000
ENV PATH="/rlvla/.venv/bin:${PATH}"

CMD ["bash"]
