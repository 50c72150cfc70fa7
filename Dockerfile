# The service: API, workers and the solvers that they start, without torch. docker-compose.yml builds and runs it.
FROM python:3.11-slim AS build
# Workers with a licence of Gurobi's need gurobi, too: --build-arg EXTRAS=server,postgres,gurobi
ARG EXTRAS=server,postgres
RUN python -m venv /opt/optpipe
WORKDIR /source
COPY pyproject.toml constraints.txt README.md ./
COPY optpipe optpipe
COPY solver solver
COPY runtime runtime
COPY server server
COPY cache cache
COPY cli cli
COPY deploy/trim.sh deploy/trim.sh
RUN /opt/optpipe/bin/pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt ".[$EXTRAS]"
RUN sh deploy/trim.sh /opt/optpipe
# What searches run is compiled here, for any CPU of this architecture, so that no container compiles it.
RUN NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=/opt/optpipe/compiled /opt/optpipe/bin/python -m optpipe_solver.compiling

FROM python:3.11-slim
COPY --from=build /opt/optpipe /opt/optpipe
COPY --chmod=755 deploy/entrypoint.sh /opt/optpipe/entrypoint.sh
# Only /tmp is written to, where numba wants its compiled code: it reads no folder that it cannot write.
ENV PATH=/opt/optpipe/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
ENV NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=/tmp/numba
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["/opt/optpipe/entrypoint.sh"]
CMD ["optpipe", "serve", "--host", "0.0.0.0"]
