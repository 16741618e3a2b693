# etcd of Debian's next release (trixie), since upstream warns about the version of bookworm. It runs
# on the libraries of bookworm, the base image of the services.
#   docker build --file docker/etcd.Dockerfile .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS package
WORKDIR /package
# Packages come from the sources of the image, including any mirror.
RUN --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi \
    && find /etc/apt \( -name '*.list' -o -name '*.sources' \) -exec sed -i 's/bookworm/trixie/g' {} + \
    && apt-get -qq -o Acquire::https::CaInfo="${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" update \
    && apt-get -qq -o APT::Sandbox::User=root download etcd-server etcd-client \
    && for name in *.deb; do dpkg -x "$name" /unpacked; done \
    && mkdir /data

FROM ${PYTHON_IMAGE}
COPY --from=package /unpacked/usr/bin/etcd /unpacked/usr/bin/etcdctl /unpacked/usr/bin/etcdutl /usr/local/bin/
COPY --from=package --chown=65532:65532 --chmod=700 /data /data
USER 65532:65532
STOPSIGNAL SIGTERM
EXPOSE 2379
LABEL org.opencontainers.image.title=tideserve-etcd org.opencontainers.image.licenses=Apache-2.0
ENV ETCD_NAME=tideserve ETCD_DATA_DIR=/data ETCD_LOG_LEVEL=warn \
    ETCD_LISTEN_CLIENT_URLS=http://0.0.0.0:2379 ETCD_ADVERTISE_CLIENT_URLS=http://etcd:2379 \
    ETCD_AUTO_COMPACTION_MODE=periodic ETCD_AUTO_COMPACTION_RETENTION=1h
HEALTHCHECK --interval=15s --timeout=5s --start-period=1m --start-interval=1s --retries=3 \
    CMD ["etcdctl", "endpoint", "health"]
ENTRYPOINT ["etcd"]
