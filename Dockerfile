# A server on CPUs, or with --build-arg DEVICE=cuda on NVIDIA GPUs; --build-arg EXTRAS=serve,json,ray adds Ray Serve.
#
#   docker build -t skipdecode .
#   docker run -p 8000:8000 -e SKIPDECODE_API_KEY -v "$PWD/outputs/quickstart:/model:ro" skipdecode /model --speedup 3

FROM python:3.12-slim
ARG DEVICE=cpu
ARG EXTRAS=serve,json

# g++ compiles the CPU kernels here, and on GPUs Triton's launchers when the server starts.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
# torch first, as it is large and changes rarely; PyPI's build is the one for CUDA.
RUN version="$(sed -n 's/^torch==//p' constraints.txt)" \
    && if [ "$DEVICE" = cuda ]; then index=https://pypi.org/simple; else index=https://download.pytorch.org/whl/cpu; fi \
    && pip install --no-cache-dir --index-url "$index" "torch==$version"
COPY skipdecode skipdecode
RUN pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"

RUN useradd --create-home --uid 1000 skipdecode
USER 1000
WORKDIR /home/skipdecode
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --start-period=5m --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["skipdecode", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/model"]
