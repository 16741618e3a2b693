{{- /* Beginning of the names of all objects; also the label that distinguishes releases. */}}
{{- define "tideserve.fullname" -}}
{{ .Values.fullnameOverride | default "tideserve" }}
{{- end }}

{{- /* Labels of the objects of a service; arguments: the root, and the service. */}}
{{- define "tideserve.labels" -}}
{{- $base := include "tideserve.fullname" (first .) -}}
app.kubernetes.io/component: {{ last . }}
app.kubernetes.io/name: {{ $base | quote }}
app.kubernetes.io/part-of: {{ $base | quote }}
{{- end }}

{{- define "tideserve.image" -}}
{{ printf "%stideserve-%s:%s%s" .root.Values.image.registry .name .root.Values.image.tag (.flavour | default "") | toJson }}
{{- end }}

{{- /* Environment of every service for etcd's credentials and mutual TLS. */}}
{{- define "tideserve.secretEnv" -}}
{{- if .Values.etcdCredentials.enabled }}
- name: TIDESERVE__ETCD_USER
  valueFrom:
    secretKeyRef: {name: {{ include "tideserve.fullname" . }}-etcd-credentials, key: user}
- name: TIDESERVE__ETCD_PASSWORD_FILE
  value: /run/secrets/tideserve/etcd-credentials/password
{{- end }}
{{- if .Values.tls.enabled }}
{{- range $prefix := list "TLS" "ETCD" }}
- name: TIDESERVE__{{ $prefix }}_CA_FILE
  value: /run/secrets/tideserve/tls/ca.crt
- name: TIDESERVE__{{ $prefix }}_CERT_FILE
  value: /run/secrets/tideserve/tls/tls.crt
- name: TIDESERVE__{{ $prefix }}_KEY_FILE
  value: /run/secrets/tideserve/tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{- define "tideserve.secretMounts" -}}
{{- if .Values.etcdCredentials.enabled }}
- name: etcd-credentials
  mountPath: /run/secrets/tideserve/etcd-credentials
  readOnly: true
{{- end }}
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: /run/secrets/tideserve/tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "tideserve.secretVolumes" -}}
{{- if .root.Values.etcdCredentials.enabled }}
- name: etcd-credentials
  secret: {secretName: {{ include "tideserve.fullname" .root }}-etcd-credentials, defaultMode: 0440}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "tideserve.fullname" .root }}-tls-{{ .service }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "tideserve.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
{{- end }}

{{- /* Kubernetes' gRPC probes do not support TLS, so with TLS a program in the container runs. */}}
{{- define "tideserve.grpcProbes" -}}
{{- if .root.Values.tls.enabled }}
{{- $alive := list "python3" "-m" "services.common.probe" "--role" .service "grpc://127.0.0.1:50051/" }}
{{- $ready := list "python3" "-m" "services.common.probe" (printf "grpc://127.0.0.1:50051/%s" .health) }}
startupProbe:
  exec: {command: {{ toJson $alive }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
livenessProbe:
  exec: {command: {{ toJson $alive }}}
  periodSeconds: 20
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  exec: {command: {{ toJson $ready }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- else }}
startupProbe:
  grpc: {port: 50051}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  grpc: {port: 50051}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: 50051, service: {{ .health }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 3
{{- end }}
{{- end }}

{{- /* Pod metadata of a service; arguments: .root, .service, .labels, and .values of the service. */}}
{{- define "tideserve.podMetadata" -}}
labels:
  {{- include "tideserve.labels" (list .root .service) | nindent 2 }}
  {{- range $label, $value := .labels }}
  {{ $label }}: {{ $value | quote }}
  {{- end }}
{{- with .values.podAnnotations }}
annotations: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "tideserve.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
serviceAccountName: {{ include "tideserve.fullname" .root }}-{{ .service }}
securityContext:
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  runAsGroup: 65532
  runAsNonRoot: true
  runAsUser: 65532
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        app.kubernetes.io/component: {{ .service }}
        app.kubernetes.io/name: {{ include "tideserve.fullname" .root | quote }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "imagePullSecrets" }}
{{- with index $.values $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tideserve.selector" -}}
revisionHistoryLimit: 5
selector:
  matchLabels:
    app.kubernetes.io/component: {{ last . }}
    app.kubernetes.io/name: {{ include "tideserve.fullname" (first .) | quote }}
{{- end }}

{{- /* Fetches the models before the gateway or a worker starts; arguments: .root, and .models, empty for `model`. */}}
{{- define "tideserve.modelContainers" -}}
{{- $root := .root }}
{{- range $model := .models | default (list dict) }}
- name: {{ $model | empty | ternary "model" (printf "model-%v" $model.id) }}
  image: {{ include "tideserve.image" (dict "root" $root "name" "model") }}
  imagePullPolicy: IfNotPresent
  env:
    - name: MODEL
      {{- if $model }}
      value: {{ toJson $model.name }}
      {{- else }}
      valueFrom:
        configMapKeyRef: {name: {{ include "tideserve.fullname" $root }}-model, key: MODEL}
      {{- end }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ include "tideserve.fullname" $root }}-hub, key: token, optional: true}
    {{- range $root.Values.model.extraEnv }}
    - {{ toJson . }}
    {{- end }}
  resources:
    limits: {memory: 2Gi}
    requests: {cpu: 250m, memory: 1Gi}
  securityContext:
    {{- include "tideserve.containerSecurity" $root | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
{{- end }}
{{- end }}

{{- define "tideserve.modelVolume" -}}
- name: models
  {{- if .Values.model.existingClaim }}
  persistentVolumeClaim: {claimName: {{ toJson .Values.model.existingClaim }}}
  {{- else if eq .Values.device "gpu" }}
  persistentVolumeClaim: {claimName: {{ include "tideserve.fullname" . }}-models}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}

{{- /* The models of the gateway, or of a worker with .model; argument: also .root. */}}
{{- define "tideserve.modelEnv" -}}
{{- if .model }}
- {name: TIDESERVE__MODEL_NAME, value: {{ toJson .model.servedName }}}
- {name: TIDESERVE__MODEL_DIR, value: {{ printf "/models/%v" .model.name | toJson }}}
{{- else }}
{{- range $key := ternary (list "MODELS") (list "MODEL_NAME" "MODEL_DIR") (not (empty .root.Values.models)) }}
- name: TIDESERVE__{{ $key }}
  valueFrom:
    configMapKeyRef: {name: {{ include "tideserve.fullname" $.root }}-model, key: {{ $key }}}
{{- end }}
{{- end }}
{{- end }}

{{- /* A quantity of memory in Mi or Gi, as a number of Mi. */}}
{{- define "tideserve.mebibytes" -}}
{{- if hasSuffix "Gi" . }}{{ mul 1024 (trimSuffix "Gi" . | atoi) }}
{{- else if hasSuffix "Mi" . }}{{ trimSuffix "Mi" . | atoi }}
{{- else }}{{ fail (printf "with worker.hostMemory, write the memory in worker.resources in whole Mi or Gi, not as %s" .) }}
{{- end }}
{{- end }}

{{- /* Resources of a worker's pod: its memory includes that for copies of KV. */}}
{{- define "tideserve.workerResources" -}}
{{- $resources := .resources }}
{{- if ne .host "0" }}
{{- $host := include "tideserve.mebibytes" .host | trim | atoi }}
{{- range $kind := list "limits" "requests" }}
{{- $part := get $resources $kind | default dict }}
{{- if hasKey $part "memory" }}
{{- $own := include "tideserve.mebibytes" (get $part "memory") | trim | atoi }}
{{- $_ := set $part "memory" (printf "%dMi" (add $own $host)) }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $resources }}
{{- end }}
