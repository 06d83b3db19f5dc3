# Keel on released wheels: docker build -t keel . && docker run --gpus all --ipc host -v "$PWD/runs:/keel/runs" keel \
#   train debug.toml
# For a machine without a GPU: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim

ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=https://pypi.org/simple

# torch.compile calls a C compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch==$TORCH_VERSION"

COPY . /opt/keel
RUN pip install --no-cache-dir "/opt/keel[tokenizers]"

WORKDIR /keel
ENTRYPOINT ["keel"]
CMD ["--help"]
