# The page in a container, for a GPU or for a CPU alone:
#   docker build -t pan2-demo . && docker run --rm -p 7860:7860 --gpus all pan2-demo
#   docker build -t pan2-demo --build-arg BASE=ubuntu:24.04 --build-arg EXTRAS=mcp \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# With kernels built beforehand, for GPUs that need not be there: --build-arg ARCH=sm_90a,sm_100a
# A real checkpoint: -v /data/PAN2:/home/user/checkpoints:ro -e ENGINE_CHECKPOINT=/home/user/checkpoints
# Several GPUs talk through /dev/shm, of which a container gets 64 MB: --shm-size=1g
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
# hadolint ignore=DL3006
FROM ${BASE}
ARG TORCH_INDEX=""
ARG EXTRAS=kernels,mcp
ARG ARCH=""

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    # Ubuntu's image has a user with the number that a Space runs as.
    && if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --create-home --uid 1000 user
USER 1000
WORKDIR /home/user/app
ENV PATH=/home/user/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    GRADIO_SERVER_NAME=0.0.0.0 \
    GRADIO_SERVER_PORT=7860 \
    GRADIO_TEMP_DIR=/home/user/uploads \
    ENGINE_OUTPUTS=/home/user/outputs \
    XDG_CACHE_HOME=/home/user/.cache \
    HF_HOME=/home/user/.cache/huggingface

COPY --chown=user pyproject.toml README.md LICENSE app.py ./
COPY --chown=user engine engine
COPY --chown=user kernels kernels
COPY --chown=user presets presets
# What is taken stands in pyproject.toml, with ranges.
# hadolint ignore=DL3013
RUN python3 -m venv /home/user/.venv \
    && if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir torch --index-url "$TORCH_INDEX"; fi \
    && pip install --no-cache-dir -e ".[$EXTRAS]" \
    && mkdir -p /home/user/outputs /home/user/uploads /home/user/checkpoints /home/user/.cache/huggingface
# Into the cache that the page looks in; a volume of its own starts with what the image holds there.
RUN if [ -n "$ARCH" ]; then python -m kernels.build --arch "$ARCH"; fi

VOLUME ["/home/user/checkpoints", "/home/user/outputs", "/home/user/.cache"]
EXPOSE 7860
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['GRADIO_SERVER_PORT'] + '/healthz', timeout=4)"]
CMD ["python", "app.py"]
