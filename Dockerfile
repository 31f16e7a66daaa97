# An image that serves models: docker build -t penstock . && docker run -p 8000:8000 -v $PWD/models:/models penstock resnet=/models/resnet.onnx
# The compiler stays in the first stage. Both have one version of Debian, so that kernels find their C library.
FROM python:3.13-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
COPY . /source
RUN pip wheel --no-cache-dir --no-deps -w /wheels /source

FROM python:3.13-slim-bookworm
RUN --mount=from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[serve]"
RUN useradd --create-home penstock
USER penstock
# Measured costs and compiled sessions; mount a volume here to keep them.
ENV PENSTOCK_CACHE=/home/penstock/cache
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=5)"]
# SIGTERM, which docker stop sends, lets the server answer what it has accepted.
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--help"]
