# snugvl for NVIDIA GPUs; with --build-arg TORCH="torch --index-url ADDRESS" for another build of torch, such as the
# CPU's, which is much smaller. torch brings CUDA; the host has the driver and the NVIDIA Container Toolkit.
FROM debian:bookworm-slim

# Triton compiles a launcher when a kernel first runs: gcc, C headers, Python's headers.
RUN apt-get update && \
    apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*

# Another version of torch than that of the constraints would only be exchanged for CUDA's below. What it needs comes
# below, too: not every index of torch's has those versions.
ARG TORCH=""
ENV PATH=/opt/snugvl/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt /src/
RUN python3 -m venv /opt/snugvl && \
    if [ -n "$TORCH" ]; then pip install -q --no-deps -c /src/constraints.txt $TORCH; fi

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install -q -c /src/constraints.txt /src && rm -rf /src

# Models, compiled kernels and calibrations are kept in /data.
RUN useradd --create-home --home-dir /data --uid 1000 snugvl
USER snugvl
WORKDIR /data
ENV HF_HOME=/data/huggingface XDG_CACHE_HOME=/data/cache TRITON_CACHE_DIR=/data/cache/triton
VOLUME /data

EXPOSE 8000
# The engine needs a while for a large model; until then /health is 503.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["snugvl"]
# Any address but this machine's own needs a key: `-v ./keys:/run/secrets/keys:ro`, a key a line.
CMD ["serve", "--host", "0.0.0.0", "--api-key-file", "/run/secrets/keys"]
