# For AMD GPUs: docker compose run --build rocm
# torch and Triton are those of the image, which must have torch 2.11, Triton 3.6 and ROCm 7.2, or later ones.
ARG BASE=rocm/pytorch:latest
# hadolint ignore=DL3006
FROM ${BASE}
WORKDIR /iris-overlap
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir 'setuptools>=77' markdown-it-py matplotlib pandas rich typer \
    && pip install --no-cache-dir --no-deps --no-build-isolation .
CMD ["python", "examples/first_steps/first_program.py"]
