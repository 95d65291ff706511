# For NVIDIA GPUs: docker compose run --build cuda
# torch brings the CUDA libraries, the host the driver. Triton compiles its launchers with the image's gcc.
FROM python:3.12-bookworm
WORKDIR /iris-overlap
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[cuda,bench]'
CMD ["python", "examples/first_steps/first_program.py"]
