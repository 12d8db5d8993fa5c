# An image for training on NVIDIA GPUs:
#
#   docker build -t liger_models .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD":/data -w /data liger_models train MODEL --data chats.jsonl ...
#
# torch's wheels bring the CUDA libraries, so the host needs only a driver and the NVIDIA Container Toolkit. Triton
# builds its launchers with a C compiler when a kernel runs first. Packages have the versions of constraints.txt.
FROM python:3.12-slim-trixie

RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY kernels kernels
COPY convert convert
COPY layers layers
COPY architectures architectures
COPY liger_models liger_models

ARG EXTRAS=hf,data,vision,lora,quantize,plot
RUN pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

RUN useradd --create-home trainer
USER trainer
WORKDIR /data
ENTRYPOINT ["liger-models"]
